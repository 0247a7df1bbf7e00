"""`tandem doctor`: whether a node or router with these options would work on this machine, before it is started."""
