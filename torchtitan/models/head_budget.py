"""How much memory the fused head takes for logits where nobody says. No torch."""

LARGEST_BYTES = 36 << 20
LEAST_BYTES = 8 << 20


def default_budget(rows: int, vocabulary: int, hidden: int) -> int:
    """Bytes for logits at a time: an eighth of the gradients by hidden states [rows, hidden] and weight [vocabulary,
    hidden] in fp32, which are made anyway, but 8 to 36 MiB."""
    return min(LARGEST_BYTES, max(LEAST_BYTES, 4 * hidden * (rows + vocabulary) // 8))
