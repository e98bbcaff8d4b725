"Sealing by several processes at once, and a study that is amended between its runs."
import copy, json, subprocess, sys
import pytest
from rxnb.records import attempts, completed, read_rows
from rxnb.spec import amend, calibration_changes, in_force, load_spec, seal
from rxnb.study import execute

def small(**changes):
    raw = copy.deepcopy(load_spec('gs1_tiny').raw)
    raw.update(name='small', steps=2, pilot_steps=1, batch_size=8, curve=None, eval=dict(n_examples=8, max_tokens=32, metric='accuracy'), budget=dict(max_wall_minutes=600, gpu_hours=0),
        arms=[dict(a, groups_per_batch=8//a['group_size'], seed=3) for a in raw['arms']], **changes)
    raw['decision_rule']['seeds'] = [3]
    return raw

def test_processes_that_seal_at_once_agree(tmp_path):
    "Ten processes, two studies of one name: one is sealed, whole, and the five of the other are refused with both hashes."
    for n in (0,1): (tmp_path/f'{n}.json').write_text(json.dumps(small(lora_rank=8+n)))
    code = 'import sys; from rxnb.spec import load_spec, seal; print(seal(load_spec(sys.argv[1]), sys.argv[2])["sha256"])'
    runs = [subprocess.Popen([sys.executable,'-c',code,str(tmp_path/f'{i%2}.json'),str(tmp_path/'runs')], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for i in range(10)]
    out = [p.communicate() for p in runs]
    hashes = [load_spec(small(lora_rank=8+n)).sha256 for n in (0,1)]
    won = json.loads((tmp_path/'runs'/'small'/'sealed.json').read_text())['sha256']
    assert won in hashes
    for i,(said,error) in enumerate(out):
        if hashes[i%2]==won: assert said.strip()==won, error
        else: assert runs[i].returncode and all(h in error for h in hashes)
    assert [p.name for p in (tmp_path/'runs'/'small').iterdir()]==['sealed.json']

def test_amendments_from_two_processes_are_a_chain(tmp_path):
    "Only one of several amendments of the same parent is taken."
    spec = tmp_path/'small.json'; spec.write_text(json.dumps(small()))
    seal(load_spec(spec), tmp_path)
    code = 'import sys; from rxnb.spec import amend, load_spec; amend(load_spec(sys.argv[1]), {"budget.max_wall_minutes": float(sys.argv[3])}, "more time", sys.argv[2])'
    runs = [subprocess.Popen([sys.executable,'-c',code,str(spec),str(tmp_path),str(n)], stderr=subprocess.PIPE, text=True) for n in range(700,704)]
    errors = [p.communicate()[1] for p in runs]
    assert sorted(p.returncode==0 for p in runs)==[False]*3+[True] and sum('is in force' in e for e in errors)==3
    assert in_force(load_spec(spec), tmp_path).spec.budget.max_wall_minutes in range(700,704)

@pytest.fixture(scope='module')
def amended(tmp_path_factory):
    "A pilot of one arm, the registered calibration, and the pilot again."
    runs = tmp_path_factory.mktemp('runs')
    cal = dict(metric='kernel_effective_neighbors_p10', parameter='arms.gs1_kernel.advantage.params.bandwidth', values=[.5,1.], max_pilot_steps=2, max_wall_minutes=10.)
    check = dict(metric='kernel_effective_neighbors_p10', measures='neighbours', min=8., max=None, one_of=None, steps=None)
    first = load_spec(small(activation_gate=dict(applicable=True, reason='on', checks=[check], calibration=cal)))
    for arm in ('gs1_kernel','grpo_gs8'): execute(first, arm, 'pilot', runs_dir=runs)
    second = amend(first, calibration_changes(first, 1.), 'too few neighbours', runs)
    return runs, first, second

def test_an_arm_that_the_amendment_changes_runs_again(amended):
    runs,first,second = amended
    assert completed(second, 'gs1_kernel', runs, 'pilot') is None
    execute(first, 'gs1_kernel', 'pilot', runs_dir=runs) # the spec as it was loaded: what is in force is executed
    folder,_ = completed(second, 'gs1_kernel', runs, 'pilot')
    manifest = json.loads((folder/'manifest.json').read_text())
    assert manifest['advantage']['params']['bandwidth']==1. and manifest['spec_sha256']==second.sha256!=first.sha256
    assert {r['spec_sha256'] for r in read_rows(folder/'steps.jsonl')}=={second.sha256}
    old = runs/'small'/'gs1_kernel'/'pilot_1'
    assert folder.name=='pilot_2' and {r['spec_sha256'] for r in read_rows(old/'steps.jsonl')}=={first.sha256} # the rows of the first pilot stay

def test_an_arm_that_it_does_not_change_counts_on(amended):
    runs,first,second = amended
    assert completed(second, 'grpo_gs8', runs, 'pilot')[0].name==completed(first, 'grpo_gs8', runs, 'pilot')[0].name=='pilot_1'
    assert len(attempts(second, 'grpo_gs8', runs, 'pilot'))==1

def test_relaxing_and_strangers_are_refused(amended):
    runs,first,second = amended
    with pytest.raises(ValueError, match='never relaxed'): amend(second, {'activation_gate.checks.kernel_effective_neighbors_p10.min':1.}, 'it does not pass', runs)
    stranger = load_spec(dict(second.raw, steps=3))
    with pytest.raises(ValueError) as e: execute(stranger, 'grpo_gs8', 'pilot', runs_dir=runs)
    assert stranger.sha256 in str(e.value) and second.sha256 in str(e.value)

def test_forging_the_seal_does_not_help(amended):
    "sealed.json replaced by another study, hash and all: the rows are still of the first."
    runs,first,second = amended
    sealed,amendments = (runs/'small'/f for f in ('sealed.json','amendments.jsonl'))
    kept = sealed.read_text(), amendments.read_text()
    forged = load_spec(dict(first.raw, steps=1))
    sealed.write_text(json.dumps(dict(json.loads(kept[0]), sha256=forged.sha256, spec=forged.raw)))
    try:
        with pytest.raises(ValueError, match='is in force'): in_force(forged, runs) # the amendments have another parent
        amendments.unlink()
        with pytest.raises(ValueError, match='was run under spec'): completed(forged, 'grpo_gs8', runs, 'pilot')
        with pytest.raises(ValueError, match=forged.sha256): in_force(first, runs)
    finally: sealed.write_text(kept[0]); amendments.write_text(kept[1])
    assert in_force(first, runs)==second
