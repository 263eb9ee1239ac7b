"""HTML to text. `loading` has files, `page` reads the elements of a page, `looks` what styles say
of them, `buffers` and `lists` put the text together.
"""

from .lists import WRITTEN
from .loading import declared_encoding, load_html
from .looks import Sheets
from .page import PageText, text_of

__all__ = ["WRITTEN", "PageText", "Sheets", "declared_encoding", "load_html", "text_of"]
