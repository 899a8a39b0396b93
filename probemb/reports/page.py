"""A report: one HTML page that needs nothing beside it. Charts are inline SVG, images small JPEGs inside the page.

Names of classes, files and models, and captions, are text of unknown origin: everything goes through `escape`.
"""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from probemb.reports.charts import escape

if TYPE_CHECKING:
    from PIL import Image

THUMBNAIL = 104  # pixels of the longer side

STYLE = """
:root{color-scheme:light}*{box-sizing:border-box}
body{margin:0;background:#f5f6f8;color:#1f2733;font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:1.2rem;margin:0 0 4px}h3{font-size:1.02rem;margin:0;overflow-wrap:anywhere}
h4{font-size:.86rem;margin:14px 0 4px;color:#5d6875;font-weight:600}
p{margin:4px 0 10px;max-width:74ch}.lead{color:#5d6875;overflow-wrap:anywhere}
section{background:#fff;border:1px solid #e0e4e9;border-radius:10px;padding:20px 22px;margin:18px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0 0}
.tile{background:#fff;border:1px solid #e0e4e9;border-radius:10px;padding:12px 16px}
.tile b{display:block;font-size:1.6rem;line-height:1.2;font-variant-numeric:tabular-nums}
.tile span{color:#5d6875;font-size:.86rem;display:block}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-size:.84rem;color:#5d6875;font-weight:600;text-align:right;padding:6px 10px;border-bottom:2px solid #e0e4e9;
white-space:nowrap}
td{padding:8px 10px;border-bottom:1px solid #eceff2;text-align:right;white-space:nowrap}
th:first-child,td:first-child,th:last-child,td:last-child{text-align:left}td:first-child{font-weight:600}
tr:last-child td{border-bottom:0}
.badge{display:inline-block;border-radius:99px;padding:1px 10px;font-size:.8rem;background:#eceff3;color:#435061}
.badge.oracle{background:#fbeadb;color:#8a3f08}.badge.honest{background:#dff1e5;color:#1d5c37}
.up{color:#1d6b3f}.down{color:#a4341f}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px 26px;margin-top:10px}
.pair>div{min-width:0}
.chart{width:100%;min-width:330px;height:auto;display:block}
.chart text{font-family:inherit}.axis{font-size:12.5px;fill:#5d6875}.tick{font-size:12px;fill:#5d6875}
.note{font-size:12.5px;font-weight:600;paint-order:stroke;stroke:#fff;stroke-width:3px}
.fine{font-size:.86rem;color:#5d6875}
.thumbs{display:flex;flex-wrap:wrap;gap:8px;margin:10px 0}
.thumbs img{height:88px;width:auto;max-width:132px;object-fit:cover;border-radius:6px;
border:3px solid #c9d0d8;display:block}
.thumbs img.right{border-color:#4b9a6b}.thumbs img.wrong{border-color:#cf7a5f}
details{margin-top:6px}summary{cursor:pointer;color:#2a6fb0;font-size:.88rem}
.narrow{display:none}
@media(max-width:560px){
.narrow{display:block;width:fit-content;border-radius:8px;padding:0 7px;font-weight:400}
table{font-size:.86rem}td:last-child,th:last-child{display:none}
td,th{padding:7px 5px}td:first-child{white-space:normal}
main{padding:18px 12px 40px}section{padding:16px 14px}h1{font-size:1.4rem}
.thumbs img{height:68px}}
"""


def html_page(title: str, body: str, generator: str, style: str = "") -> str:
    """A whole page around the HTML `body`; `generator` says which command wrote it, `style` is added to STYLE."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="generator" content="{escape(generator)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def percent(share: float) -> str:
    """0.1234 as "12.34"."""
    return f"{100 * share:.2f}"


def correlation(bins: dict) -> str:
    """Both correlations of `probemb.metrics.Bins` (as a dict) in a sentence."""
    return f"Pearson {signed(bins['pearson'])} over bins; Spearman {signed(bins['spearman'])} over single items."


def signed(value: float | None) -> str:
    """+0.12, −0.12, or "undefined"."""
    return "undefined" if value is None else f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def thumbnail(picture: Image.Image, told: str, css_class: str = "") -> str:
    """A small copy of an image inside the page, with a text for those who cannot see it; shrinks `picture` itself."""
    picture.thumbnail((THUMBNAIL * 2, THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=82)
    data = base64.b64encode(buffer.getvalue()).decode()
    told = escape(told)
    return f'<img class="{escape(css_class)}" alt="{told}" title="{told}" src="data:image/jpeg;base64,{data}">'
