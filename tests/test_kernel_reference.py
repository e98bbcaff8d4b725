"""The kernel baseline, written a second time from its equations: plain loops over Python floats.

    z_i  = (phi_i - mean) / s, s with ddof 0, and 0 in a constant column
    K_ij = exp(-|z_i - z_j|^2 / 2h^2)
    m_i  = sum_{j != i} K_ij            b_i = sum_{j != i} K_ij r_j / m_i, or the mean of the others where m_i is 0 or below the floor
    n_i  = m_i^2 / sum_{j != i} K_ij^2, or 0 where every K_ij is 0
"""
import math
from collections import Counter
import numpy as np, pytest
from rxnb.advantages import estimator
from rxnb.kernels import kernel_baseline

SEED,WINDOWS = 20260901,1000

def standardised(phi):
    "Columns of a list of rows, on one scale."
    out = [list(row) for row in phi]
    for f in range(len(phi[0])):
        column = [row[f] for row in phi]
        same = all(x==column[0] for x in column)
        mean = math.fsum(column)/len(column)
        s = math.sqrt(math.fsum((x-mean)**2 for x in column)/len(column))
        for row in out: row[f] = 0. if same else (row[f]-mean)/s
    return out

def reference(phi, rewards, h, floor, standardise):
    "Baseline, mass and effective neighbours of each rollout."
    z,out = standardised(phi) if standardise else phi, []
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j!=i]
        E = [-sum((a-b)**2 for a,b in zip(z[i],z[j]))/(2*h*h) for j in others]
        m = math.fsum(math.exp(e) for e in E)
        K = [math.exp(e-max(E)) for e in E] # a common factor cancels in b and n; without it the squares of small weights vanish
        n = 0. if m==0 else math.fsum(K)**2/math.fsum(k**2 for k in K)
        if m==0 or m<floor: b = math.fsum(rewards[j] for j in others)/len(others)
        else: b = math.fsum(k*rewards[j] for k,j in zip(K,others))/math.fsum(K)
        out.append((b, m, n))
    return [list(column) for column in zip(*out)]

def window(rng, kind):
    "Features, rewards, bandwidth and floor of a small window of a kind."
    N,F = (2 if kind=='a single neighbour' else int(rng.integers(3,13))), int(rng.integers(1,4))
    phi,h = rng.normal(size=(N,F))*10**rng.uniform(-2,2,F)+rng.normal(size=F), 10**rng.uniform(-1,1)
    if kind=='one constant feature': phi[:,rng.integers(F)] = .1
    if kind=='constant features': phi[:] = rng.normal(size=F)
    if kind=='repeated prompts': phi = phi[rng.integers(0,max(1,N//3),N)]
    if kind=='empty mass': phi,h = np.arange(1.,N+1)[:,None]**2*np.ones(F), 10**rng.uniform(-5,-3)
    if kind=='one near, the rest far': phi[0],phi[1:],h = 0.,1e3+1e3*np.arange(N-1)[:,None]**2,1.; phi[1] = .5
    rewards = rng.integers(0,2,N)*1. if rng.random()<.5 else rng.random(N)
    return phi.tolist(), rewards.tolist(), float(h), float(rng.choice([0.,1e-3,.5]))

KINDS = ('any','one constant feature','constant features','repeated prompts','a single neighbour','empty mass','one near, the rest far')

def test_a_thousand_windows():
    rng,met = np.random.default_rng(SEED), Counter()
    for n in range(WINDOWS):
        kind = KINDS[n%len(KINDS)]
        phi,rewards,h,floor = window(rng, kind)
        raw = kind=='one near, the rest far' or bool(rng.random()<.25)
        want = reference(phi, rewards, h, floor, not raw)
        got = kernel_baseline(phi, rewards, h, floor, standardise=not raw)
        for name,a,b in zip(('baseline','mass','effective neighbours'), (got.baseline_N,got.mass_N,got.n_eff_N), want):
            assert np.abs(a-np.array(b)).max()<=1e-12, (n, kind, name, a.tolist(), b)
        met['no mass at all'] += all(m==0 for m in want[1])
        met['below the floor'] += any(0<m<floor for m in want[1])
        met['a kernel mean'] += any(m>max(floor,0) for m in want[1])
        met['one of several counts'] += len(phi)>2 and any(abs(x-1)<1e-9 for x in want[2])
        met[kind] += 1
    assert min(met.values())>=50 and len(met)==len(KINDS)+4, met # every case that the equations tell apart has come up

@pytest.mark.parametrize('W', (2,3,256))
def test_the_sliding_window(W):
    "What the estimator subtracts over many steps is the reference on the last W rollouts, the batch among them."
    rng = np.random.default_rng(SEED+W)
    est,past = estimator('kernel', window=W, bandwidth=.5, min_mass=1e-3), []
    for step in range(30):
        B = int(rng.integers(max(1,2-len(past)), min(W,9)+1))
        batch = [(rng.normal(size=2).tolist(), float(rng.integers(0,2))) for _ in range(B)]
        past = (past+batch)[-W:]
        baseline = reference([p for p,_ in past], [r for _,r in past], .5, 1e-3, True)[0][-B:]
        got = est([r for _,r in batch], [f'{step}.{i}' for i in range(B)], features=[p for p,_ in batch])
        assert np.abs(got.baseline_B-baseline).max()<=1e-12
        assert np.abs(got.advantage_B-([r for _,r in batch]-np.array(baseline))).max()<=1e-12
