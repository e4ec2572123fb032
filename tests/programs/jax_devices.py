"""An array that is spread over several devices of JAX: the layouts' sizes are the argument."""

import sys

import jax
import numpy as np

import kvbm
import kvbm.jax

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
one = jax.device_put(np.zeros((2, 3, 4, 16, 2, 32), "float32"), spec)
try:
    kvbm.jax.convert([one], "vllm/LBHNC", "vllm/BLHNC", sys.argv[1])
except kvbm.BindError as error:
    print(error)
