"""Flow-matching samplers: how the next latent follows from the present one and the predicted velocity.

Convention of all of them: `x_t = (1 - s) x_0 + s e`, velocity `v = e - x_0`, sigma `s` falls from 1 to 0,
`dt = s' - s < 0`.
"""
