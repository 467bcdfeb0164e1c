"""Version numbers such as "1.10.2" and "2.0-beta"."""


def parse_version(version: str) -> list[int]:
    """Return the numbers of a version without zeros at the end: "1.10.0-beta" -> [1, 10]."""
    numbers = [int(part) for part in version.split("-")[0].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def compare_versions(first: str, second: str) -> int:
    """Return -1, 0 or 1 if the first version is older, equal or newer. A version with "-" is older than one without."""
    first_key = (parse_version(first), "-" not in first)
    second_key = (parse_version(second), "-" not in second)
    if first_key == second_key:
        return 0
    return -1 if first_key < second_key else 1


def find_newest(versions: list[str]) -> str:
    """Return the newest version without "-", the first one of equals; "" if there is none."""
    newest = ""
    for version in versions:
        if "-" not in version and (newest == "" or compare_versions(version, newest) > 0):
            newest = version
    return newest


def is_compatible(required: str, installed: str) -> bool:
    """Return whether the installed version has the same first number as the required one and is not older."""
    same_major = parse_version(required)[:1] == parse_version(installed)[:1]
    return same_major and compare_versions(installed, required) >= 0
