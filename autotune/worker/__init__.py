"""What lives inside the probe processes, started by command line.

The search imports of it only what reads a task's answer and a process's last words.
"""
