"""Import all modules of the packages that are named as arguments: run in an image, to see that nothing is missing."""

import importlib
import pkgutil
import sys

for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
