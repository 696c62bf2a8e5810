"""scripts/hlo_text.py: bytes of collectives, from lines as the TPU's compiler writes them."""

from tests import scripts

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=8
  %a = f32[8,4096]{1,0:T(8,128)S(1)} all-reduce(%x), channel_id=1, to_apply=%add
  %b = (f32[2,3]{1,0}, bf16[4]{0}) all-reduce(%x, %y), channel_id=2, to_apply=%add
  %c = (f32[8,4]{1,0}, f32[8,32]{1,0}) all-gather-start(%z), channel_id=3, dimensions={1}
  %d = f32[8,32]{1,0} all-gather-done(%c)
  %e = (bf16[8,128]{1,0:S(1)}, bf16[8,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%y), \
source_target_pairs={{7,4},{6,0}}, frontend_attributes={is_spmd_generated="true"}
  %f = pred[16]{0} collective-permute(%y), channel_id=5, source_target_pairs={{0,1}}
"""


def test_collectives_are_counted_by_what_reaches_a_device():
    with scripts.imported("hlo_text") as module:
        found = module.collectives(PROGRAM)
    reduced, gathered = 4 * 8 * 4096 + 4 * 6 + 2 * 4, 4 * 8 * 32
    assert found == {"all-reduce": reduced, "all-gather": gathered, "collective-permute": 2048 * 2 / 8 + 16 / 8}
