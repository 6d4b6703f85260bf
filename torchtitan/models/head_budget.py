"""How much memory the fused head takes for logits where nobody says. No torch."""

LARGEST_BYTES = 36 << 20
LEAST_BYTES = 8 << 20


def default_budget(rows: int, vocabulary: int, hidden: int, converts: bool = False) -> int:
    """Bytes for logits [rows, vocabulary] at a time: an eighth of the gradients by hidden states [rows, hidden] and
    weight [vocabulary, hidden] in fp32, which are made anyway, but 8 to 36 MiB. 36 MiB also where that holds all
    logits, so that none is computed twice, and where it has to hold a converted weight (converts)."""
    if converts or 4 * rows * vocabulary <= LARGEST_BYTES:
        return LARGEST_BYTES
    return min(LARGEST_BYTES, max(LEAST_BYTES, 4 * hidden * (rows + vocabulary) // 8))
