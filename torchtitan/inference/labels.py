"""The label under which a foreign engine serves a weights version: `<epoch>/<version>`. It comes back with every token
that was sampled under it."""

from __future__ import annotations


def make_label(epoch: str, version: int) -> str:
    """Raises ValueError where it could not be read back."""
    label = f"{epoch}/{version}"
    if parse_label(label) != (epoch, version):
        raise ValueError(f"epoch {epoch!r}, version {version}: cannot be a label")
    return label


def parse_label(label: object) -> tuple[str, int] | None:
    """(epoch, version), or None where it is none of ours: weights that the engine has from elsewhere."""
    if not isinstance(label, str):
        return None
    epoch, slash, version = label.rpartition("/")
    return (epoch, int(version)) if slash and epoch and version.isascii() and version.isdigit() else None
