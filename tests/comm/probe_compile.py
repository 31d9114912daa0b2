import time, sys, torch
from tests.support.oracle import make_trainer, small_config, true_gradients
from tests.support.ranks import run_ranks
def body(rank, world, compiled, sp):
    config = small_config(model={"layers": 2, "hidden": 16, "heads": 2, "seq": 8, "vocab": 17}, layout={"tp": 2, "sequence_parallel": sp}, train={"global_batch": 2, "compile": compiled})
    t = make_trainer(config, rank, world); t0=time.time()
    g = true_gradients(t)
    return {r.name: x.numpy().copy() for r, x in g}, {tuple(e): (y.calls,y.payload_bytes) for e,y in t.ctx.ledger.entries.items()}, time.time()-t0
if __name__=="__main__":
    for sp in (False, True):
        a=run_ranks(2, body, False, sp); 
        try: b=run_ranks(2, body, True, sp, deadline=300)
        except AssertionError as e: print(str(e)[-3000:]); continue
        for x,y in zip(a,b): print(sp, y[2], max(abs(x[0][n]-y[0][n]).max() for n in x[0]), x[1]==y[1], len(x[1]))
