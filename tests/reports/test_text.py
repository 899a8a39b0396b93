"""Untrusted addresses that may become links."""

import pytest

from probemb.reports.text import web_link


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("https://photos.example/a.jpg?b=1&c=2#d", True), ("HTTP://photos.example:8080/ä.jpg", True),
        ("javascript:alert(1)", False), ("data:text/html,x", False), ("//x.example/x", False), ("file:///etc", False),
        ("https://bank.example@evil.example/", False), ("https://bank.example\\@evil.example/", False),
        ("https://x.example/\u202egnp.exe", False), ("https://x.example/a b", False), ("https://", False), (7, False),
        ("https://x.example/\"><script>", False), ("https://[::1", False), ("https://x:99999/", False), (None, False),
        ("https://x.example/" + "a" * 2_000, False), ("https://x.example/\n", False),
    ],
)  # fmt: skip
def test_addresses_that_may_become_links(address, fine):
    assert web_link(address) == (address if fine else None)
