"""``lightning-omni checkpoint``: the state that a server has saved, as a checkpoint of Lightning."""

from __future__ import annotations

from pathlib import Path


def checkpoint(directory: Path, out: Path, overwrite: bool = False) -> int:
    """Converts the state that a parameter server has saved into a Lightning checkpoint.

    With it plain Lightning, or a further run with OmniStrategy, goes on where the run was: Trainer.fit(ckpt_path=OUT).
    Of a run whose ranks were started together it has the weights alone. A server may be using the directory meanwhile.

    Args:
        directory: The --state directory of lightning-omni serve.
        out: File of the checkpoint, as in run.ckpt.
        overwrite: Replace the file if there is one.
    """
    # Not above: --help is not to wait for torch.
    from lightning_omni.cli.console import print_line
    from lightning_omni.strategy.exported import export_checkpoint

    exported = export_checkpoint(directory, out, overwrite)
    if exported.is_whole:
        epoch, step = exported.checkpoint["epoch"], exported.checkpoint["global_step"]
        print_line(f"{out}: epoch {epoch}, step {step}, weights of {exported.updates} updates; pass it as ckpt_path=")
    else:
        print_line(f"{out}: weights of {exported.updates} updates, and no more; it cannot be passed as ckpt_path=")
    for note in exported.notes:
        print_line(f"note: {note}")
    return 0
