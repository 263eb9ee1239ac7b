"""HTML to text. `page` reads the elements of a page, `looks` what styles say of them, `buffers` and
`lists` put the text together.
"""

from .lists import WRITTEN
from .looks import Sheets
from .page import PageText, declared_encoding, load_html, text_of

__all__ = ["WRITTEN", "PageText", "Sheets", "declared_encoding", "load_html", "text_of"]
