"""Does the picture of lesson 19 stay readable?"""

import pytest

from ddp_course.draw.games import players


@pytest.mark.parametrize(("world_size", "num_envs"), [(1, 4), (2, 8), (3, 4)])
def test_no_text_collides(world_size, num_envs, readable):
    readable([players(world_size, num_envs)])
