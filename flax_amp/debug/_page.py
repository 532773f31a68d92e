"""The page of an explanation: `page.html`, with the explanation as JSON in it."""

import html
import json
from pathlib import Path

from flax_amp.debug._model import Explanation

_TEMPLATE = Path(__file__).with_name("page.html")
_HEIGHT = 640  # of the frame in a notebook


def as_page(found: Explanation) -> str:
    """Returns one page that needs nothing else."""
    # A `</script>` in a string would end the script.
    data = json.dumps(found.to_dict(), separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(f"{found.name} in {found.compute_dtype}")
    page = _TEMPLATE.read_text(encoding="utf-8")
    return page.replace("{{title}}", title).replace("{{data}}", data)


def as_frame(found: Explanation) -> str:
    """Returns the page in a frame, so that its styles leave a notebook alone."""
    page = html.escape(as_page(found), quote=True)
    return (
        f'<iframe srcdoc="{page}" width="100%" height="{_HEIGHT}" '
        'style="border: 0"></iframe>'
    )
