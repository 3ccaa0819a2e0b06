"""The cluster that the end-to-end tests run on: `e2e/cluster up`, `down`, `load`, …

With a Docker engine that can pull images it is plain `kind`. Without one, everything is built here: engine, Kubernetes,
node image and network, from Debian packages and Go modules alone.
"""
