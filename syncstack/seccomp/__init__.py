"""The seccomp profiles: one table, the files made from it, and a way to apply them to an ordinary process."""
