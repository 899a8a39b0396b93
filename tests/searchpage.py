"""A search page behind a real server, requests to it, and the page in a real headless Chromium."""

import json
import threading
from contextlib import contextmanager

import pytest
import requests
from waitress import wasyncore

from tests.browser import chromium
from tools.search.page import make_app, make_server

UPLOAD = 2 << 20


@contextmanager
def serving(*searchers, host="127.0.0.1"):
    """A server of searchers; they are named first, second, …"""
    named = dict(zip(("first", "second", "third"), searchers))
    server = make_server(make_app(named, host, max_upload=UPLOAD), host, 0, UPLOAD)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.trigger.pull_trigger(lambda: wasyncore.close_all(server._map))  # in the server's own thread
        thread.join(5)
        server.task_dispatcher.shutdown()


@pytest.fixture(scope="session")
def port(searcher):
    with serving(searcher) as server:
        yield int(server.effective_port)


def request(port, method="GET", path="/", files=None, **headers):
    """(status, headers, body) of one request."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = requests.request(method, f"http://127.0.0.1:{port}{path}", files=files, headers=headers, timeout=30)
    return answer.status_code, answer.headers, answer.content


def post(port, fields, files=(), **headers):
    """(status, JSON) of a search."""
    parts = [(name, (None, value)) for name, value in fields] + [(name, more) for name, *more in files]
    status, _, data = request(port, "POST", "/search", parts, **headers)
    return status, json.loads(data)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def page(browser, port):
    """The page, ready; at the end nothing may have been complained about."""
    browser.open("about:blank")
    browser.complaints.clear()
    browser.resize(1280, 900)
    open_page(browser, f"http://127.0.0.1:{port}/")
    yield browser
    assert browser.complaints == []


CARDS = "[...document.querySelectorAll('.card')]"
STATUS = "document.querySelector('#status')"
SETTLED = f"{STATUS}.textContent && !document.querySelector('#go').disabled"
KEYS = f"{CARDS}.map(c => c.querySelector('.key').textContent)"


def open_page(browser, address):
    """The page at an address of its own, ready."""
    browser.open(address)
    browser.wait("document.body?.dataset.ready === 'yes'")


def reload(browser):
    """Reload the page, until it is ready."""
    browser.run("document.body.dataset.ready = 'before'")
    browser.call("Page.reload")
    browser.wait("document.body?.dataset.ready === 'yes'")


def search_for(page, text):
    page.click("[name=text]")
    page.run("document.activeElement.select()")
    page.type(text)
    page.press_enter()
    page.wait(SETTLED)
