"""The site's configuration. ``make docs`` builds it; nothing is downloaded, and a warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import lightning_omni

project = "lightning-omni"
author = "lightning-omni developers"
release = lightning_omni.__version__
html_title = f"lightning-omni {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "combinations",
    "commands",
    "mathml",
    "public_names",
    "words",
]
exclude_patterns = ["_build"]
default_role = "literal"  # docstrings write `name` as the pages do

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_use_type_comments = False
python_maximum_signature_line_length = 88

smartquotes_action = "D"  # dashes, and quotes as they are

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#3457a6", "color-brand-content": "#3457a6"},
    "dark_css_variables": {"color-brand-primary": "#8fb0ff", "color-brand-content": "#8fb0ff"},
}
html_math_renderer = "mathml"
html_show_sphinx = False
html_show_copyright = False  # the license is in the repository
html_copy_source = False
