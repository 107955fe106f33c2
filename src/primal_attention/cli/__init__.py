"""The command ``primal``: one file a command, each loaded when it is asked for.

Nothing here imports torch before the arguments are understood.
"""
