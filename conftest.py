"""Settings for every test of the repository."""

from hypothesis import settings

# Time limits on single examples fail on a busy machine and say nothing about the code.
settings.register_profile("pdcluster", deadline=None)
settings.load_profile("pdcluster")
