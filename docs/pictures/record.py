"""Record a session as a text cast (asciinema's version 2), from real runs: python docs/pictures/record.py.

``asciinema play docs/pictures/session.cast`` shows it. Times are those of the machine that recorded it.
"""

from __future__ import annotations

import codecs
import json
import os
import pty
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "lightning-omni compare --speeds 1,1,1,0.25 --link 100Gbit --model-size 50MB --step 0.2s",
    "lightning-omni compare --speeds 4x1 --link 10Gbit --model-size 50MB --step 0.2s --sites 2 --site-link 200Mbit",
    "python -W ignore examples/tabular.py",
)
WIDTH, HEIGHT = 150, 40


def output_of(command: str) -> list[tuple[float, str]]:
    """Run a command in a terminal of its own; return what it printed and when, in seconds of ``time.monotonic``."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    process = subprocess.Popen(
        command.split(), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    found, decoder = [], codecs.getincrementaldecoder("utf-8")()
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the last process that writes has ended
            data = b""
        if not data:
            break
        found.append((time.monotonic(), decoder.decode(data)))
    os.close(ours)
    if process.wait():
        raise RuntimeError(f"{command} ended with status {process.returncode}: {''.join(text for _, text in found)}")
    return found


def main() -> None:
    """Run the commands one after the other, and write the cast."""
    began = time.monotonic()
    title = f"lightning-omni, recorded {datetime.now(timezone.utc):%Y-%m-%d}"
    lines: list[object] = [{"version": 2, "width": WIDTH, "height": HEIGHT, "title": title}]
    for command in COMMANDS:
        lines.append((round(time.monotonic() - began, 3), "o", f"$ {command}\r\n"))
        lines += [(round(at - began, 3), "o", text) for at, text in output_of(command)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (ROOT / "docs" / "pictures" / "session.cast").write_text(text.replace(str(ROOT), "."), encoding="utf-8")


if __name__ == "__main__":
    main()
