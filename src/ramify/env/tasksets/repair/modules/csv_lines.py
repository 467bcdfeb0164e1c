"""Lines of comma-separated fields. A field in double quotes may contain commas, and "" for a double quote."""


def split_line(line: str) -> list[str]:
    """Return the fields of a line: `a,"b,c","d""e"` has the fields `a`, `b,c` and `d"e`; an empty line has one, ``."""
    fields: list[str] = []
    field = ""
    is_quoted = False
    index = 0
    while index < len(line):
        character = line[index]
        if character == '"':
            if is_quoted and line[index + 1 : index + 2] == '"':
                field += '"'
                index += 1
            else:
                is_quoted = not is_quoted
        elif character == "," and not is_quoted:
            fields.append(field)
            field = ""
        else:
            field += character
        index += 1
    fields.append(field)
    return fields


def join_fields(fields: list[str]) -> str:
    """Return a line of the fields. Only fields with a comma or a double quote are quoted."""
    parts: list[str] = []
    for field in fields:
        if "," in field or '"' in field:
            field = '"' + field.replace('"', '""') + '"'
        parts.append(field)
    return ",".join(parts)


def count_columns(lines: list[str]) -> int:
    """Return the number of fields that all lines have; -1 if they differ, 0 if there are no lines."""
    if not lines:
        return 0
    width = len(split_line(lines[0]))
    for line in lines[1:]:
        if len(split_line(line)) != width:
            return -1
    return width
