"""A copy runs a plan on two pools: transfers, the strategies between them, and how to choose one."""
