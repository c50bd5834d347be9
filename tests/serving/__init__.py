from tests.matching import *  # noqa: F403
