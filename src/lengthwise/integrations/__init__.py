"""Planned steps inside trainers of other libraries, each in a module of its own, which imports that library."""
