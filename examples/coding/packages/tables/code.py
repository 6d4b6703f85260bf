"""Small tables: a list of rows, each a dictionary from column to text or number."""


def parse(text, separator=","):
    """Read a table whose first line names the columns. A cell in double quotes may hold the separator, and "" in it is
    a quote. Raises ValueError for a row with another number of cells."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return []
    names = _cells(lines[0], separator)
    rows = []
    for line in lines[1:]:
        cells = _cells(line, separator)
        if len(cells) != len(names):
            raise ValueError(f"{len(cells)} cells, but {len(names)} columns")
        rows.append(dict(zip(names, cells, strict=True)))
    return rows


def _cells(line, separator):
    cells, cell, quoted, i = [], "", False, 0
    while i < len(line):
        character = line[i]
        if character == '"':
            if quoted and line[i + 1 : i + 2] == '"':
                cell += '"'
                i += 1
            else:
                quoted = not quoted
        elif character == separator and not quoted:
            cells.append(cell)
            cell = ""
        else:
            cell += character
        i += 1
    cells.append(cell)
    return cells


def with_numbers(rows):
    """Return the rows with every cell that is a whole number as int; " 7 " and "-7" are, "" and "7.0" are not."""
    result = []
    for row in rows:
        new = {}
        for name, cell in row.items():
            digits = cell.strip()
            if digits.startswith("-"):
                digits = digits[1:]
            new[name] = int(cell) if digits.isdigit() else cell
        result.append(new)
    return result


def group_sums(rows, key, value):
    """Return {cell of key: sum of value}, in the order of first appearance."""
    sums = {}
    for row in rows:
        sums[row[key]] = sums.get(row[key], 0) + row[value]
    return sums


def join(left, right, key):
    """Return every pair of rows with the same key as one row, in the order of the left rows; cells of the left one
    stay."""
    by_key = {}
    for row in right:
        by_key.setdefault(row[key], []).append(row)
    result = []
    for row in left:
        result += [{**other, **row} for other in by_key.get(row[key], [])]
    return result


def ranked(rows, column, count):
    """Return the `count` rows with the largest cells of a column, largest first; equal ones keep their order."""
    if count <= 0:
        return []
    ordered = sorted(rows, key=lambda row: row[column], reverse=True)
    return ordered[:count]


def rendered(rows):
    """Return the table as text: columns as wide as their widest cell, two spaces between them, numbers to the right,
    no spaces at the end of a line."""
    if not rows:
        return ""
    names = list(rows[0])
    lines = []
    widths = {name: max(len(str(row[name])) for row in rows) for name in names}
    for name in names:
        widths[name] = max(widths[name], len(name))
    lines.append("  ".join(name.ljust(widths[name]) for name in names).rstrip())
    for row in rows:
        cells = []
        for name in names:
            text = str(row[name])
            right = isinstance(row[name], int)
            cells.append(text.rjust(widths[name]) if right else text.ljust(widths[name]))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
