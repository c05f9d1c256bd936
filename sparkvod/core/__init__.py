"""What all front ends share: the world, names and checks of collectives, handles, objects, compression, buckets.

Nothing here knows a framework. A front end adds an adapter (``collectives.Adapter``) and what its autograd needs.
"""
