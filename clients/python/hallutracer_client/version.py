"""The version of the distribution; setuptools reads it from here, without importing anything."""

VERSION = "1.0.0"
