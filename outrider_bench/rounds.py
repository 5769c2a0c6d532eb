"""Orders the items that each round of a measurement repeats."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def there_and_back(items: Sequence[_Item], round_number: int) -> Iterator[_Item]:
    """The items in order in even rounds, and in reverse order in odd ones.

    So drift of the machine affects all items alike.
    """
    if round_number % 2 == 0:
        return iter(items)
    return reversed(items)
