"""The script of the ranks: runs cases one after the other, each under the strategies that are asked for.

Options: {"fits": [[case, kind], ...], "ranks": n, "limit": seconds a fit}; kinds are "ddp", "one" and "groups".
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cases import BY_NAME
from common import FOLDER, OPTIONS, omni, pl
from fit import Fit, run_case

RANK = int(os.environ.get("LOCAL_RANK", 0))


def main() -> None:
    for number, (name, kind) in enumerate(OPTIONS["fits"]):
        case = BY_NAME[name]
        (FOLDER / f"begun.{RANK}").touch()
        faulthandler.dump_traceback_later(OPTIONS["limit"], exit=True, file=sys.stderr)

        def make_ddp(case=case):
            return pl.strategies.DDPStrategy(**case.ddp)

        def make_strategy(case=case, kind=kind):
            if kind == "ddp":
                return make_ddp()
            groups = {"one": 1, "groups": 2}[kind]
            return omni.OmniStrategy(groups=groups, **case.ddp, **(case.omni if kind == "groups" else {}))

        facts = run_case(Fit(case, make_strategy, make_ddp, FOLDER / "work" / f"{number}", OPTIONS["ranks"]))
        faulthandler.cancel_dump_traceback_later()
        partial = FOLDER / f"partial-{number}-{RANK}"
        partial.write_text(json.dumps(facts, default=str))
        partial.rename(FOLDER / f"{number}.{RANK}.json")
        if facts["error"]:  # other ranks may wait for this one, and processes are no longer what they were
            sys.stdout.flush()
            sys.stderr.flush()
            break


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
