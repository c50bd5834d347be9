"""The version of the distribution; setuptools reads it from here, without importing anything."""

VERSION = "0.1.0"
