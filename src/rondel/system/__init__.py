"""What the operating system gives and refuses: files, clock, signals, sockets, HTTP
connections, terminals, memory of a process. No torch.
"""
