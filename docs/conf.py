"""Settings of the documentation: `make docs` builds it with Sphinx, offline."""

import importlib.metadata
import re
import shutil
from pathlib import Path

project = "flax_amp"
author = "The flax_amp authors"
copyright = "2026, the flax_amp authors"
release = importlib.metadata.version("flax_amp")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}
nb_execution_mode = "off"
exclude_patterns = ["_build", "jupyter_execute"]

# Pages that stand beside the code are a part of the site: copies, in the folders that
# they have in the repository, so that the links between them hold.
ROOT = Path(__file__).parents[1]
COPIES = Path(__file__).parent / "_repository"
shutil.rmtree(COPIES, ignore_errors=True)
PATTERNS = """ARCHITECTURE.md CHANGELOG.md docs/*.svg flax_amp/*/README.md
    benchmarks/README.md benchmarks/results/*.*"""
for pattern in PATTERNS.split():
    for page in ROOT.glob(pattern):
        copy = COPIES / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, copy)

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
highlight_language = "none"  # a block without a language is output
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88  # else one argument in a line
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # jnp.bfloat16, not <class 'jax.numpy.bfloat16'>
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# In docstrings, one backtick stands for code.
default_role = "code"

html_theme = "sphinx_book_theme"
html_title = "flax_amp"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_theme_options = {
    "navbar_persistent": [],  # the search field is in the sidebar
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
}
html_copy_source = False
toc_object_entries_show_parents = "hide"  # update(), not Optimizer.update()


def _as_restructured_text(app, what, name, obj, options, lines):
    """Turns the Markdown links of docstrings into those of reStructuredText."""
    lines[:] = [
        re.sub(r"(?<!`)\[([^]]+)\]\((http[^)]+)\)", r"`\1 <\2>`__", x) for x in lines
    ]


def _link_to_copies(app, docname, source):
    """Lets links to pages outside of this folder lead to their copies, and back.

    The search does not look into the copies.
    """
    if docname.startswith("_repository"):
        text = re.sub(r"\]\(((?:\.\./)+)docs/(?=\w+\.md)", r"](\1../", source[0])
        source[0] = "---\nnosearch: true\n---\n" + text
    else:
        source[0] = re.sub(
            r"\]\(\.\./(?=flax_amp|benchmarks)", "](_repository/", source[0]
        )


def _mark_breaks(app, pagename, templatename, context, doctree):
    """Lets the browser break a long name in code where a reader would break the name.

    The places follow a dot, an underscore, a slash, a parenthesis, an equals sign or a
    comma. A short name stays whole. Copied code has no marks.
    """

    def marked(word):
        places = r"(?<=\w[._/(=,])(?=[^\W\d]{2}|[&'(])"
        return re.sub(places, "<wbr>", word[0])

    if "body" in context:
        pattern = r'(?<=<span class="pre">)[^<]{18,}'
        context["body"] = re.sub(pattern, marked, context["body"])


def setup(app):
    app.connect("autodoc-process-docstring", _as_restructured_text)
    app.connect("source-read", _link_to_copies)
    app.connect("html-page-context", _mark_breaks)
