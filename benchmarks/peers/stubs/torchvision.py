"""Stand-in for torchvision, which text models do not use and whose build on PyPI is for CUDA."""

import absent_package

__path__: list[str] = []
absent_package.stand_in(__name__)
