"Hand settings.ini to setuptools; put the notebooks that `rxnb.study` executes into the wheel."
import shutil
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages
from setuptools.command.build_py import build_py

root = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
s = ini['DEFAULT']
lib = s['lib_path']

class WithNotebooks(build_py):
    "A wheel has no nbs/ beside it, so the two notebooks that run a study travel as rxnb/notebooks/."
    def run(self):
        super().run()
        if self.editable_mode: return
        to = Path(self.build_lib)/lib/'notebooks'
        to.mkdir(parents=True, exist_ok=True)
        for name in ('run_arm.ipynb', 'run_study.ipynb'): shutil.copy(root/s['nbs_path']/name, to)

extras = {k.removesuffix('_requirements'): v.split() for k,v in s.items() if k.endswith('_requirements')}
setup(name=s['lib_name'], version=s['version'], description=s['description'], author=s['author'], author_email=s['author_email'],
    url=s['git_url'], license='Apache-2.0', python_requires=f">={s['min_python']}", packages=find_packages(include=[lib, f'{lib}.*']),
    package_data={lib: ['specs/*.json', 'models/*/*', 'assets/*']}, install_requires=s['requirements'].split(), extras_require=extras,
    entry_points={'nbdev': [f'{lib}={lib}._modidx:d'], 'console_scripts': s['console_scripts'].split()}, cmdclass={'build_py': WithNotebooks},
    long_description=(root/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown')
