"""The page's own files: HTML, style and script modules, shipped in the package as they are."""

from importlib.resources import files

PAGE = "index.html"
STYLE = "style.css"
SCRIPTS = (
    "format.js",
    "dom.js",
    "source.js",
    "charts.js",
    "overview.js",
    "learning.js",
    "timeline.js",
    "health.js",
    "tokens.js",
    "trajectories.js",
    "main.js",
)
"""The page's modules, each after those that it imports."""

_KINDS = {"html": "text/html; charset=utf-8", "css": "text/css", "js": "text/javascript"}


def read_file(name: str) -> tuple[str, bytes]:
    """Media type and content of one of the page's files.

    Raises:
        KeyError: there is none of that name.
    """
    if name not in (PAGE, STYLE, *SCRIPTS):
        raise KeyError(name)
    folder = files("headrace.observe.dashboard").joinpath("static")
    return _KINDS[name.rpartition(".")[2]], folder.joinpath(name).read_bytes()
