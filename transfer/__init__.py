"""Moving the state of a request from a prefill rank to a decode rank: transports, rendezvous, plan, leases, digests."""
