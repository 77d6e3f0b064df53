"""Spikes of requests on an elastic pool, simulated: arrivals come in, waits and costs of several ways to start a worker go out.

    trace ─► requests ─► serving: engines, links and fleet of the simulator, production's `wanted` ─► figures

Its files:

    __main__.py      runs a trace on each pool, and compares with lambdaScale's figures
    arrivals.py      draws and reads arrivals
    serving.py       simulates a pool that serves them; the constants of models
"""
