"""A server, or a leader that pushes for ever through memory that it shares with one: to be killed.

serve                 says its address
lead ADDRESS PIPE     joins as rank 1, says so, and pushes once something is written to the pipe
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from lightning_omni.server.core import ServerCore
from lightning_omni.transport.zeromq.addresses import PrivateDirectory
from lightning_omni.transport.zeromq.server import ZeroMQServer


def say(line: str) -> None:
    """To the test."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def serve() -> None:
    """Serves."""
    server = ZeroMQServer(ServerCore(bytes(range(32)), secrets.token_bytes), directory=PrivateDirectory())
    say(server.address)
    server.run(lambda: False)


def lead(address: str, pipe: str) -> None:
    """Pushes."""
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests), str(tests / "unit" / "transport")]
    from test_shared_memory import Leader

    leader = Leader(address, 1, 2, numel=50_000)
    say("joined")
    Path(pipe).read_text()
    while True:
        leader.push(leader.pushes, read_at=0)
        if leader.pushes == 2:
            say(f"pushed {leader.data.shared}")


if __name__ == "__main__":
    {"serve": serve, "lead": lead}[sys.argv[1]](*sys.argv[2:])
