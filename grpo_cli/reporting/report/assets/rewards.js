// The tab of rewards: the values of each function, and its share of the advantages.

function rewardsTab() {
  const names = [...new Set(report.runs.flatMap((run) => Object.keys(run.curves.columns))
    .values())].flatMap((n) => { const m = /^rewards\/(.+)\/mean$/.exec(n); return m ? [m[1]] : []; });
  if (!names.length) return missing('No reward is recorded.');
  return h('div', { class: 'stack' },
    report.runs.map((run) => rewardTable(run, names)),
    report.runs.map((run) => shareCard(run, names)),
    h('div', { class: 'charts two' }, names.map((name) => metricChart(`rewards/${name}/mean`, name)),
      metricChart('reward_std', 'reward, standard deviation within a group'),
      metricChart('frac_reward_zero_std', 'groups without a signal', PERCENT),
      metricChart('rewards_none', 'completions without a reward')));
}

function rewardTable(run, names) {
  const own = names.filter((n) => column(run, `rewards/${n}/mean`));
  const rows = own.map((name) => {
    const [means, spread, part] = ['mean', 'std', 'advantage_share'].map((k) => tenths(run, `rewards/${name}/${k}`));
    return [name, number(run.rewards[name]), number(means?.first), number(means?.last), number(spread?.last),
      part ? share(part.last) : 'not recorded'];
  });
  return card({ title: report.two ? `Reward functions: ${run.label}` : 'Reward functions', note: 'Averages over the first and the last tenth of the steps, before weights. Share: how much of the advantage’s variance this reward explains.' },
    grid([{ title: 'function' }, { title: 'weight', number: true }, { title: 'mean, first', number: true }, { title: 'mean, last', number: true }, { title: 'deviation, last', number: true }, { title: 'share of the advantage', number: true }], rows, 'Reward functions'));
}

function shareCard(run, names) {
  const own = names.filter((n) => column(run, `rewards/${n}/advantage_share`));
  const title = report.two ? `Share of the advantage's variance: ${run.label}` : 'Share of the advantage’s variance';
  if (!own.length) return card(title, missing('Not recorded by this version.'));
  const inks = ['stage-generate', 'stage-forward_backward', 'stage-reward', 'stage-ref_logprobs', 'stage-old_logprobs', 'stage-optimizer', 'stage-weights', 'stage-other'];
  const lines = own.map((name, i) => ({ label: name, x: run.curves.steps, ink: inks[i % inks.length], values: column(run, `rewards/${name}/advantage_share`).map((v) => v ?? 0) }));
  return card(title, chart({ title: 'by reward function', lines, legend: true, wide: true, range: [0, 1], smoothing: settings.smoothing, format: (v) => share(v), axis: (v) => share(v, 0), alarms: run.alarms || [] }));
}
