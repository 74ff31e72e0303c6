"""Write the project's addresses into README.md and pyproject.toml, for a release: release.py REPOSITORY TAG.

PyPI shows README.md without the repository, so its pictures and links need whole addresses, and the lines on installing
from a checkout are wrong there. The workflow that publishes calls this with the addresses of the repository in which it
runs; they are not in the tree, which has no public address.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def released(readme: str, repository: str, tag: str) -> str:
    """Return README.md as PyPI is to show it."""
    readme = re.sub(r".*until the first release\n", "", readme).replace("  # from then on", "")
    readme = re.sub(r"(!\[[^]]*\]\()(?=docs/)", rf"\g<1>{repository}/raw/{tag}/", readme)
    return re.sub(r"(\]\()(?=docs/)", rf"\g<1>{repository}/blob/{tag}/", readme)


def main(repository: str, tag: str) -> None:
    """Change both files in place."""
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    readme.write_text(released(readme.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")
    pages = {"Documentation": f"{repository}/blob/{tag}/docs/index.md", "Source": repository}
    pages |= {"Issues": f"{repository}/issues", "Changelog": f"{repository}/blob/{tag}/docs/contribute/changelog.md"}
    urls = "".join(f'{name} = "{address}"\n' for name, address in pages.items())
    text = project.read_text(encoding="utf-8")
    project.write_text(
        text.replace("[project.scripts]\n", f"[project.urls]\n{urls}\n[project.scripts]\n"), encoding="utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
