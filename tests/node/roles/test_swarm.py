from pathlib import Path
from swarm import Swarm

async def test_run_ends(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir) as swarm:
        import time
        t=time.time()
        await swarm.start_trainer()
        print("start", time.time()-t)
        swarm.add_worker("w1")
        await swarm.wait_step(2)
        print("step2", time.time()-t)
        summary = await swarm.finished()
        print("end", time.time()-t)
        await swarm.workers["w1"].ended()
        print("end", time.time()-t)
        print(summary, swarm.heads().keys(), swarm.metrics()[-1])
