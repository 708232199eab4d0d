"""What runs in the user's training process: standard library and torch only, Python 3.9 and up.

The folder is copied beside a ``sitecustomize`` under a name of its own, so that it also works in an
interpreter that has no feedtune; modules here import each other relatively and nothing else of the project.
"""
