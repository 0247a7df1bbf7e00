"""`tandem chaos`: a stack of real processes under load, with faults on purpose, and a verdict.

options ──► plan (faults, from the seed)
        ──► fleet (2 prefill, 2 decode, router; whatever ends is started again on its ports)
        ──► tasks (the right answers, from a unified node that nobody disturbs)
        ──► load (clients that judge every answer)
        ──► checks (what must hold at the end) ──► report
"""
