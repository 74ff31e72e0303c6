"""``lightning-omni checkpoint``: the conversion of a server's saved state into a Lightning checkpoint."""

from __future__ import annotations

from pathlib import Path


def checkpoint(directory: Path, out: Path, overwrite: bool = False) -> int:
    """Convert the state that a parameter server has saved into a Lightning checkpoint.

    Plain Lightning, or a further run with OmniStrategy, continues the run from it: Trainer.fit(ckpt_path=OUT). If all
    ranks were started together, the checkpoint holds only the weights. A server may use the directory meanwhile.

    Args:
        directory: The --state directory of lightning-omni serve.
        out: File of the checkpoint, as in run.ckpt.
        overwrite: Replace an existing file.
    """
    # Imported here, so that --help does not wait for torch.
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
