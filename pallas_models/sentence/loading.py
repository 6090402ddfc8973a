"""The door to `weights`, the package that reads checkpoints, for those who have to load or save a model."""

import importlib.util
import os
import threading
from pathlib import Path

from pallas_models import target as targets


def begin_loading() -> None:
    """Starts the GPU in a thread: files can be read in the meantime, until parameters go to it.

    Raises:
      ImportError: `import weights` would find another module than the one beside this package.
    """
    check_weights_package()
    threading.Thread(target=targets.start).start()


def check_weights_package() -> None:
    """Raises ImportError where `import weights` would find another module, such as a user's weights.py."""
    ours = Path(__file__).parents[2] / "weights" / "__init__.py"
    spec = importlib.util.find_spec("weights")
    found = spec.origin if spec else None
    if found is None or not Path(found).exists() or not os.path.samefile(found, ours):
        raise ImportError(
            f"{found or 'nothing'} is what `import weights` finds, not {ours}, the package beside pallas_models "
            "that reads checkpoints; rename the file that is in its way, or take its folder off sys.path",
            name="weights",
            path=found,
        )
