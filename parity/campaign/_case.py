"""What every part of a campaign consists of."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One trial.

    Attributes:
      name: the trial in a line.
      run: makes the trial and says what is wrong, or None where it went as it should. An exception is a failure.
      row: of which row of the report's table it is; none where it measures nothing.
      measured: what `run` measured, by the columns of the table, which have the largest of each.
    """

    name: str
    run: Callable[[], str | None]
    row: tuple[str, ...] = ()
    measured: dict[str, float] = dataclasses.field(default_factory=dict)
