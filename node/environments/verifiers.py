"""The verifiers adapter: a taskset of that library as one of our environments, played in this process.

The only file that imports verifiers (the bundled tasksets apart), and importing it costs seconds: go
through build.py. Model calls never leave the process: no harness program, no interception server, no
HTTP. Two ways to play, and the same episode from both:

- a plain taskset (one turn, no Env of its own, no @vf.intercept) takes a short way: its Trace is built
  from verifiers' public types and verifiers' own Task.setup, @vf.stop, finalize and score() run over
  it. 0.3 ms of CPU a rollout, where the library's HTTP loop takes 5.4 ms;
- everything else goes through verifiers' own Env.run, Agent and Rollout, with a harness that calls the
  policy directly and a runtime that runs no commands.

Environments with tool servers or containers are refused: a node runs no commands for a stranger.
"""


