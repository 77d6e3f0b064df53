"""An OpenEnv environment in the shape of `openenv init`, written against the package `openenv` alone: it knows nothing of MARLaaS.

models.py   its action and observation
server/     the environment, and the app that serves it
"""
