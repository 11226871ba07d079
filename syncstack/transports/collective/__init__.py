"""The transport ``collective``: one sender and many workers form a group of their own and pass the bytes on.

Two ways were weighed to get one version into n workers over a network. (a) A broadcast of the group's: Gloo's is a
tree, so the sender's own network carries the bytes log2(n) times. (b) *Chosen:* a chain. The sender sends to the first
worker, and each worker passes on what it receives while more is coming: every network interface carries the bytes once,
however many workers there are. Over links of one rate the last worker is done a piece (4 MiB) for each member later.

The group is made without ``torch.distributed.init_process_group`` and so without touching a default group, in the
trainer or in the engine: addresses are exchanged over the data links, which are open and authenticated, and no store
listens anywhere. What travels in the group itself is plain TCP between ports that the kernel chooses, as Gloo does it;
the digests, which decide, come over the links.
"""
