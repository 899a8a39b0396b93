"""Cleans captions of web corpora: removes markup, and replaces anonymised names by words."""

import html
import re

from probemb.data.shards.samples import MAX_CAPTION_CHARS

PERSON = "person"  # the word that CC3M uses for a name

_ANONYMOUS = re.compile(r"<\s*(?:person|usr|user)\s*>|\[\s*(?:PERSON|USR)\s*\]", re.IGNORECASE)
_HIDDEN = re.compile(r"<(script|style)\b[^<>]*>.{0,2000}?</\1\s*>|<!--.{0,2000}?-->", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"</?[a-z][^<>]{0,1000}>|<[!?|][^<>]{0,1000}>", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x20\x7f-\xa0\u1680\u2000-\u200b\u2028-\u202f\u205f-\u2069\u3000\ufeff\ud800-\udfff]+")
_PASSES = 10
_LONGEST = 4 * MAX_CAPTION_CHARS  # the rest is ignored


def clean_caption(text: str) -> str:
    """The caption without markup, in one line; "" if nothing is left.

    - `<PERSON>` (CC12M) and `<usr>`, `[USR]` (RedCaps) become "person".
    - Character references are resolved, also doubled ones, and tags removed, until nothing changes: CLIP's tokenizer
      resolves references itself, and a resulting "<end_of_text>" would end the caption there.
    - Control characters, changes of writing direction, line breaks and runs of blanks become one blank; the text is cut
      at 2,000 characters.

    "a < b", "<3" and other lone angle brackets stay. Letters keep their case; the tokenizer lowers them.
    """
    text = text[:_LONGEST]
    for _ in range(_PASSES):
        before = text
        text = html.unescape(text)
        text = _ANONYMOUS.sub(f" {PERSON} ", text)
        text = _TAG.sub(" ", _HIDDEN.sub(" ", text))
        if text == before:
            break
    else:  # maliciously nested
        text = text.replace("<", " ").replace("&", " ")
    return _tidy(text)[:MAX_CAPTION_CHARS].strip()


def _tidy(text: str) -> str:
    text = _CONTROL.sub(" ", text).strip()
    return re.sub(rf"(?<={PERSON}) (?=[,.;:!?)])", "", text)  # "<PERSON>, smiling": no blank before the comma
